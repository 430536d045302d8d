"""One plan, many processes: a rank per device, each with the stages of its own."""
