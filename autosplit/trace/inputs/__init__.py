"""What a call is given, and the signature under which its recording is kept."""
