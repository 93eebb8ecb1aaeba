"""Records what people see of a run: meters, and sinks for records. Does not load torch itself."""

from lockstep.monitor.callbacks import DistributedMonitor, JsonLogger, ResourceMonitor
from lockstep.monitor.figures import Figures
from lockstep.monitor.meters import Meters, PhaseClock
from lockstep.monitor.monitor import Monitor
from lockstep.monitor.sinks import Sink

__all__ = [
    "DistributedMonitor",
    "Figures",
    "JsonLogger",
    "Meters",
    "Monitor",
    "PhaseClock",
    "ResourceMonitor",
    "Sink",
]
