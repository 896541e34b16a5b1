"""Speculative decoding as mathematics: numpy only, no grpc, no torch.

One convention everywhere, that of Leviathan et al. 2023 (arXiv 2211.17192): p is the target, q is the draft.
"""
