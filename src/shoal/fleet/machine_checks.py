"""Judgements on a machine and a run's directory: pure functions of :class:`Machine`."""

from __future__ import annotations

from shoal.fleet.findings import Check, ok, trap, warn
from shoal.fleet.machine import Machine
from shoal.fleet.run_config import Config, part

TORCHFT_SERIES = "0.2"
KEPT_CHECKPOINTS = 4
CLOCK_SLACK_SECONDS = 5.0
EARLIEST_CLOCK = 1_735_689_600.0  # 1 January 2025: no shoal is older


def machine_checks(machine: Machine, *, workers: int = 1) -> list[Check]:
    """Versions, threads and ports.

    Args:
        machine: the facts.
        workers: how many run on this machine.
    """
    found = [ok("python", machine.python)]
    for package in ("shoal", "torch"):
        version = machine.versions.get(package)
        if version:
            found.append(ok(package, version))
        else:
            rule = "versions are compared by the packages' metadata"
            found.append(trap(package, "not installed", rule, f"pip install {package}"))
    found += [_torchft(machine), _threads(machine, workers)]
    if machine.bind_error:
        value = f"none can be listened on ({machine.bind_error})"
        rule = "the supervisor and the coordinator each listen on one"
        fix = "allow listening on 127.0.0.1 (settings of the container or the firewall)"
        found.append(trap("loopback port", value, rule, fix))
    else:
        found.append(ok("loopback port", "a free one can be bound"))
    return found


def _torchft(machine: Machine) -> Check:
    version = machine.versions.get("torchft")
    install = f"pip install 'torchft~={TORCHFT_SERIES}.0'"
    new_python = tuple(int(digits) for digits in machine.python.split(".")[:2]) >= (3, 14)
    if version is None and (machine.system != "linux" or new_python):
        where = "this Python" if machine.system == "linux" else machine.system
        return ok("torchft", f"not made for {where}: fleets have a fixed size here (torchrun)")
    if version is None:
        return trap("torchft", "not installed", "an elastic fleet needs it on Linux", install)
    if not f"{version}.".startswith(f"{TORCHFT_SERIES}."):
        rule = f"this shoal is built on torchft {TORCHFT_SERIES}; others fail without an error"
        return trap("torchft", version, rule, install)
    if machine.torchft_error:
        value = f"{version}, cannot be imported ({machine.torchft_error})"
        rule = "it must fit the installed torch and Python"
        return trap("torchft", value, rule, f"reinstall it: {install} --force-reinstall")
    return ok("torchft", f"{version}, importable")


def _threads(machine: Machine, workers: int) -> Check:
    value = f"{machine.threads} per process, {machine.cores} cores"
    if machine.threads == 1 or machine.threads * workers <= machine.cores:
        return ok("threads", value)
    rule = "with more threads than cores workers wait for each other in every step"
    fix = f"set OMP_NUM_THREADS={max(1, machine.cores // workers)}"
    return warn("threads", f"{value}, {workers} workers", rule, fix)


def directory_checks(machine: Machine, config: Config) -> list[Check]:
    """The run's directory and supervisor: can be written, has space, keeps time, answers.

    Args:
        machine: the facts.
        config: ``run.json``, empty if there is none yet.
    """
    found: list[Check] = []
    if not config:
        rule = "the supervisor writes it after the first committed step"
        found.append(warn("run.json", "missing", rule, "look again once a step is committed"))
    if machine.writable:
        found.append(ok("run directory", "writable"))
    else:
        rule = "events, metrics and checkpoints go there"
        fix = "change its permissions, or copy the run to a directory of your own"
        found.append(trap("run directory", "not writable", rule, fix))
    return [*found, _space(machine, config), _clock(machine), *_supervisor(machine)]


def _space(machine: Machine, config: Config) -> Check:
    free = f"{_in_bytes(machine.free_bytes)} free"
    parameters = part(config, "model").get("parameters")
    if not isinstance(parameters, int):
        return ok("disk", free)
    kind = str(part(config, "optimizer").get("kind"))
    checkpoint = parameters * 4 * (1 + {"sgd": 0, "adam": 2, "adamw": 2}.get(kind, 1))
    value = f"{free}, a checkpoint takes about {_in_bytes(checkpoint)}"
    if machine.free_bytes >= KEPT_CHECKPOINTS * checkpoint:
        return ok("disk", value)
    rule = "a new checkpoint is written beside the old one before that is removed"
    fix = "free some space, or put the run directory on a larger disk"
    level = trap if machine.free_bytes < 2 * checkpoint else warn
    return level("disk", value, rule, fix)


def _in_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1e12 else f"{count / 1e12:,.3g} TB"
    return f"{count} B"


def _clock(machine: Machine) -> Check:
    rule = "times in events and metrics are compared across machines"
    if machine.now < EARLIEST_CLOCK:
        return warn("clock", "before 2025", rule, "set the clock (NTP)")
    if machine.newest is not None and machine.newest > machine.now + CLOCK_SLACK_SECONDS:
        value = f"{machine.newest - machine.now:.0f} s behind the run's newest file"
        return warn("clock", value, rule, "synchronise the clocks (NTP)")
    return ok("clock", "plausible" if machine.newest is None else "not behind the run's files")


def _supervisor(machine: Machine) -> list[Check]:
    if machine.pid_alive is None:
        return [ok("supervisor", "the run is not running")]
    if not machine.pid_alive:
        value = "gone, but its control.json is still there"
        rule = "a supervisor that ends in order removes it"
        return [warn("supervisor", value, rule, "go on with `shoal run --resume`")]
    found = [ok("supervisor", "alive")]
    silent = "not reachable, though the supervisor lives"
    for name, answers in machine.reachable.items():
        if answers:
            found.append(ok(f"{name} port", "reachable"))
        elif name == "control":
            rule = "workers and `shoal resize` speak to it"
            fix = (
                "look for a firewall, else stop the supervisor and go on with `shoal run --resume`"
            )
            found.append(trap("control port", silent, rule, fix))
        else:
            rule = "workers form a new membership through it; the supervisor restarts it"
            fix = "look again in a few seconds, then at its log in RUN/logs"
            found.append(warn(f"{name} port", silent, rule, fix))
    return found
