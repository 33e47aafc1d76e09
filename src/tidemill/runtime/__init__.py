"""What both wings and every process stand on."""
