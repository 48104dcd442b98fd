"""Engines that train many trials of a search at once, all equal to the plain loop."""
