"""dtorch: one program drives many devices, in plain PyTorch."""
