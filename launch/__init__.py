"""The command line and composition root: the only place that builds things."""
