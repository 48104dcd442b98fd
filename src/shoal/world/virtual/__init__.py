"""Virtual workers inside one process."""

from shoal.world.virtual.world import VirtualEvent, VirtualWorld

__all__ = ["VirtualEvent", "VirtualWorld"]
