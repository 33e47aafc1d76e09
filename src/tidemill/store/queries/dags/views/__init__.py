"""What the command line and the web pages read about tasks."""
