"""An open loop: requests leave when they are due, whatever has become of earlier ones."""
