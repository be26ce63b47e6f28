"""Portable Triton kernels and their launcher, for every backend whose hardware runs Triton."""
