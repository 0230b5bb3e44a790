"""What is compiled where the project is installed and a C compiler is there; Python does the same."""
