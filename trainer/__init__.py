"""Training: objectives, curriculum, engine, loop, checkpoints, metrics, tracking."""
