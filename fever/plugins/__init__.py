"""What users bring: parts given as `module:Name`, and networks of their own."""
