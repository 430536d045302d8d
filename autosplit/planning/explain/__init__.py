"""What a plan says in words: reasons, advice, and what a change would bring."""
