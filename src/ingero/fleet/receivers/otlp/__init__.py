"""The ``otlp`` receiver: OTLP over gRPC and HTTP in, batches out, the threshold on every answer.

`intake` is what a push meets, over either protocol of `ingero.serving.otlp`; `receiver` is the lifecycle. Refuses to
interpret what it receives: who pushed is found by processors.
"""

from ingero.fleet.component import Stability
from ingero.fleet.factory import ALL_SIGNALS, ReceiverFactory
from ingero.fleet.receivers.otlp import telemetry
from ingero.fleet.receivers.otlp.config import OtlpReceiverConfig
from ingero.fleet.receivers.otlp.receiver import OtlpReceiver

FACTORY = ReceiverFactory(
    type="otlp",
    config=OtlpReceiverConfig,
    description="Takes OTLP over gRPC and HTTP and answers each push with its threshold.",
    signals=ALL_SIGNALS,
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    example={
        "protocols": {
            "grpc": {"endpoint": "localhost:4317"},
            "http": {"endpoint": "localhost:4318"},
        }
    },
    create=OtlpReceiver,
)

__all__ = ["FACTORY", "OtlpReceiver", "OtlpReceiverConfig"]
