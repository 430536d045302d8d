"""The search over chunks, schedules, recomputation and cuts."""
