"""Using what was trained."""
