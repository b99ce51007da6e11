"""amp-lab: mixed-precision training, from scratch and in the open."""
