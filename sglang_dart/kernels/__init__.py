"""Steps of a round as Triton kernels, each the twin of a plain-torch one."""
