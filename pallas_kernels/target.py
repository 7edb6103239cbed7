"""What the code will run on, as far as it decides which kernel is built."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class Target:
    platform: str
    """"cpu", "gpu" or "tpu"."""
    kind: str
    """As the device names itself, for example "NVIDIA H200" or "TPU v6 lite"."""
    capability: int = 0
    """Compute capability of an NVIDIA GPU times ten (90 is Hopper); 0 elsewhere."""
    num_cores: int = 1
    """Multiprocessors of a GPU."""


def current_target() -> Target:
    """The device that a computation traced now is for: the abstract mesh's, if it names one, else the default device."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        platform = getattr(abstract, "platform", None) or ("tpu" if "TPU" in abstract.device_kind else "gpu")
        return _target(platform, abstract.device_kind, None)
    default = getattr(jax.config, "jax_default_device", None)
    device = jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]
    return _target(device.platform, device.device_kind, device)


def _target(platform: str, kind: str, device: jax.Device | None) -> Target:
    if platform in ("cuda", "gpu"):
        capability = getattr(device, "compute_capability", None)
        return Target(
            platform="gpu",
            kind=kind,
            capability=round(float(capability) * 10) if capability else _capability_of(kind),
            num_cores=getattr(device, "core_count", None) or 132,
        )
    return Target(platform=platform, kind=kind)


def _capability_of(kind: str) -> int:
    """Of a GPU that is only named, not present."""
    families = (("H100", 90), ("H200", 90), ("H20", 90), ("GH200", 90), ("B200", 100), ("GB200", 100), ("A100", 80))
    return next((capability for name, capability in families if name in kind), 80)
