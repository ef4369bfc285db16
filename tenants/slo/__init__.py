"""What was promised and what was kept: objectives, how a request is judged by them, sums, burn rates and reports."""
