# SPDX-License-Identifier: Apache-2.0

from .activation_monitor import (
    ActivationMonitor as ActivationMonitor,
)
from .activation_stats import (
    ActivationStats as ActivationStats,
)
from .dataset import (
    DatasetStats as DatasetStats,
    ParamCount as ParamCount,
)
from .images import (
    ImageVisualizer as ImageVisualizer,
)
from .memory import (
    MemoryMonitor as MemoryMonitor,
)
from .mlperf import (
    MLPerf as MLPerf,
)
from .monitor import (
    Monitor as Monitor,
)
from .optimizer_monitor import (
    LRMonitor as LRMonitor,
    OptimizerMonitor as OptimizerMonitor,
)
from .periodic import (
    PeriodicData as PeriodicData,
)
from .profiler import (
    TorchProfiler as TorchProfiler,
)
from .speed import (
    RuntimeEstimator as RuntimeEstimator,
    SpeedMonitor as SpeedMonitor,
)
from .step_time import (
    StepTimeMonitor as StepTimeMonitor,
)
from .system_monitor import (
    SystemMonitor as SystemMonitor,
)
