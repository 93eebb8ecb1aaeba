"""Records what people see of a run: meters, and sinks for records. Does not load torch itself.

Monitor(config.monitor, run, is_main=…, total_steps=…)   on_step, on_eval, event, close
"""

from lockstep.monitor.callbacks import DistributedMonitor, JsonLogger, ResourceMonitor
from lockstep.monitor.figures import Figures
from lockstep.monitor.meters import Meters, PhaseClock, memory_in_use
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
    "memory_in_use",
]
