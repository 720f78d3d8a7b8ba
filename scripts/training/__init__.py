"""The recipe of the shipped checkpoint: corpus, backbone, drafter, quantisation, export."""
