"""Operators of their own: a specification in plain torch, C for the CPU, CUDA for GPUs; one file each."""
