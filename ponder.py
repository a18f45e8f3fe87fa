"""The public face for those who write plugins; importing it loads nothing heavy."""
