"""`lockstep manifest`: what `lockstep train` would apply to a Kubernetes cluster."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import typer

from lockstep.cli.options import Config, Overrides, app, echo, load_settings


@app.command()
def manifest(
    config: Config = None,
    overrides: Overrides = None,
    run_name: Annotated[
        str | None, typer.Option("--name", help="The run directory's name in the pods. Default: <name>-<date>-<time>.")
    ] = None,
) -> None:
    """Print what a run with launch.kind kubernetes applies to the cluster, as YAML. Nothing is applied."""
    from lockstep.launch.kubernetes_manifest import Plan
    from lockstep.launch.start import new_run_dir

    settings = load_settings(config, overrides)
    if settings.launch.kind != "kubernetes":
        raise ValueError(f"launch.kind is {settings.launch.kind}: manifests are for kind kubernetes")
    plan = Plan.of(settings, run_name or new_run_dir(settings.name).name, uuid.uuid4().hex)
    echo(_as_yaml([plan.config_map(), plan.workload()]), nl=False)


def _as_yaml(manifests: list[dict[str, Any]]) -> str:
    import yaml

    class Readable(yaml.SafeDumper):
        """Texts of several lines as such."""

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Readable.add_representer(str, represent)
    return yaml.dump_all(manifests, Dumper=Readable, sort_keys=False, allow_unicode=True)
