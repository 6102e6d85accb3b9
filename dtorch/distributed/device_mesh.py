"""``torch.distributed.device_mesh``: the meshes of :mod:`dtorch.mesh`."""

from ..mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
