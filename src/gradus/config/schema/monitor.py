"""Where the numbers of a run go besides its folder: one config for each kind of tracker."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from gradus.config.schema.base import (
    OWN_PLUGIN,
    OwnPlugin,
    PluginConfig,
    StrictConfig,
    by_type,
)
from gradus.log import LogFormat, LogLevel, LogSettings

_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""Without a dot: `x.json` is what a tracker called `x` notes."""


class LogConfig(StrictConfig):
    """What the processes of a run write into `logs/`."""

    level: LogLevel = "info"
    """Least level that is written, in every process: environment workers, ranks of the trainer and
    the engine's processes too. "debug" lets the libraries talk as well."""
    format: LogFormat = "text"
    """How a line looks: for a person, or as one JSON object for a program."""

    def settings(self) -> LogSettings:
        """The same for the processes of a run that has no name yet."""
        return LogSettings("", self.level, self.format)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_Pattern = Annotated[str, Field(min_length=1)]


class MonitorConfig(PluginConfig):
    """A tracker. It gets what the run writes into its folder, from a separate process."""

    library: ClassVar[str] = ""
    """The module that it needs; empty when gradus brings all of it."""
    is_alone: ClassVar[bool] = False
    """Its library serves one connection in a process."""
    extra: ClassVar[str] = ""
    """The extra of gradus that installs the library."""

    name: str | None = Field(None, pattern=_NAME_PATTERN)
    """Tells trackers of one type apart. None means the type."""
    group: str | None = None
    """Runs that belong together, where the tracker knows groups. None means no group."""
    tags: list[str] = Field(default_factory=list)
    """Words to find the run by, where the tracker knows tags."""
    episodes_interval_steps: int | None = Field(10, ge=1)
    """Steps between tables of sample episodes. None means no tables: then no text of a prompt or a
    reply leaves the run's folder."""
    flush_seconds: float = Field(30.0, ge=0)
    """How long the end waits for what is not sent yet. `gradus view RUN --to ...` sends it."""

    pass_env: list[str] = Field(default_factory=list)
    """Variables of the caller's shell that the tracker's process gets besides those that its
    library is known to read. Their values stand in no config and no log."""

    include: list[_Pattern] = Field(default_factory=lambda: ["*"], min_length=1)
    """Which metrics it gets, with * and ? as in a shell."""
    exclude: list[_Pattern] = Field(default_factory=list)
    """Which of these it does not get: `machine/*`, for example."""

    @property
    def variables(self) -> list[str]:
        """What its process gets of the caller's shell by name."""
        return self.pass_env

    @property
    def title(self) -> str:
        return self.name or self.type.rpartition(":")[2]


class TensorBoardConfig(MonitorConfig):
    """Event files for TensorBoard."""

    type: Literal["tensorboard"] = "tensorboard"
    implementation = "gradus.tracking.tensorboard:TensorBoard"
    library = "tensorboard"
    extra = "tensorboard"
    folder: str | None = None
    """Folder of the event files; each run gets a folder of its name in it. None means
    `tensorboard` in the folder of the run."""


class PrometheusConfig(MonitorConfig):
    """A page of numbers that Prometheus scrapes during the run. It has no password."""

    type: Literal["prometheus"] = "prometheus"
    implementation = "gradus.tracking.prometheus.tracker:Prometheus"
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen at."""
    allow_public_bind: bool = False
    """Allow a host that is not a loopback address: everybody who reaches it can read the page."""
    port: int = Field(0, ge=0, le=65_535)
    """Port to listen at. 0 lets the system choose; `ready/prometheus.json` has the address."""
    episodes_interval_steps: int | None = Field(None, ge=1)
    """Prometheus takes no texts."""

    def arguments(self) -> dict[str, Any]:
        """What is only checked does not reach the class."""
        return {k: v for k, v in super().arguments().items() if k != "allow_public_bind"}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """A public page must be wanted."""
        if not self.allow_public_bind and not is_loopback(self.host):
            yield (
                "host",
                f"{self.host!r} can be reached by others, and the page has no password; use "
                "127.0.0.1, or set allow_public_bind if that is wanted",
            )


class WandbConfig(MonitorConfig):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    implementation = "gradus.tracking.wandb:Wandb"
    library = "wandb"
    is_alone = True
    extra = "wandb"
    project: str = Field("gradus", pattern=r"^[^/\\#?%:]{1,128}$")
    """The project that holds the run."""
    entity: str | None = Field(None, min_length=1)
    """Account or team. None means the default one of the key."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes into the folder of the run only; `wandb sync` uploads it. None means
    WANDB_MODE, and without that `online`."""


class MlflowConfig(MonitorConfig):
    """MLflow: a server, or a store in the folder of the run."""

    type: Literal["mlflow"] = "mlflow"
    implementation = "gradus.tracking.mlflow:Mlflow"
    library = "mlflow"
    extra = "mlflow"
    experiment: str = Field("gradus", min_length=1, max_length=500)
    """The experiment that holds the run; made when it is not there."""
    tracking_uri: str | None = None
    """The server as `http://host:port`, or `sqlite:////folder/mlflow.db`. None means
    MLFLOW_TRACKING_URI, and without that `mlflow/mlflow.db` in the folder of the run."""


class TrackioConfig(MonitorConfig):
    """Trackio: a SQLite file for `trackio show`."""

    type: Literal["trackio"] = "trackio"
    implementation = "gradus.tracking.trackio:Trackio"
    library = "trackio"
    extra = "trackio"
    project: str = Field("gradus", min_length=1)
    """The project that holds the run."""
    folder: str | None = None
    """Folder of the projects. None means TRACKIO_DIR, and without that `trackio` in the folder of
    the run."""


class WebhookConfig(MonitorConfig):
    """Posts a line where an alarm begins or is over, and where the run ends, to one address: a
    channel of Slack, Mattermost, Discord or Teams, or a server of your own. It sends no numbers."""

    type: Literal["webhook"] = "webhook"
    implementation = "gradus.tracking.webhook:Webhook"
    url_var: str = Field("GRADUS_WEBHOOK_URL", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The variable of the caller's shell that holds the address, which is a secret."""
    key: str = Field("text", min_length=1, max_length=64)
    """Under which key of the JSON object the line stands: `content` for Discord."""
    episodes_interval_steps: int | None = Field(None, ge=1)
    """It sends no tables."""

    @property
    def variables(self) -> list[str]:
        """The address too."""
        return [*self.pass_env, self.url_var]


class OwnMonitorConfig(OwnPlugin, MonitorConfig):
    """A tracker of your own."""


MonitorChoice = Annotated[
    Annotated[TensorBoardConfig, Tag("tensorboard")]
    | Annotated[PrometheusConfig, Tag("prometheus")]
    | Annotated[WandbConfig, Tag("wandb")]
    | Annotated[MlflowConfig, Tag("mlflow")]
    | Annotated[TrackioConfig, Tag("trackio")]
    | Annotated[WebhookConfig, Tag("webhook")]
    | Annotated[OwnMonitorConfig, Tag(OWN_PLUGIN)],
    by_type(None),
]
"""Every tracker, by its `type`."""


class TrackConfig(StrictConfig):
    """What `gradus view --to` takes: one tracker."""

    monitor: MonitorChoice
    """The tracker."""
