"""Experiment trackers as callbacks: what `--log wandb` and `--log mlflow` make."""
