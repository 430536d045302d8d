"""Cuts of a line of groups, searched by the predicted time of a step."""
