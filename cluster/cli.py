"""The command line. Errors a user can cause are one line on stderr and exit code 2; stdout is for answers."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from typer.exceptions import TyperException

from cluster import running
from cluster.config import ServeConfig, SpeculativeConfig
from cluster.errors import BringUpError, ConfigError, ServerError
from cluster.faults import Faults, stress_faults
from cluster.model_source import resolve_model
from cluster.processes import adopt_orphans
from cluster.progress import Display
from cluster.ray_environment import prepare, prepare_to_join
from cluster.stop_signals import StopSignals

if TYPE_CHECKING:
    from cluster.bench_prompts import Prompt
    from cluster.client import Client
    from worker.training_run import Score

WAIT_S = 0.5
log = logging.getLogger("cluster.cli")

app = typer.Typer(
    name="slipstream",
    help="Serve language models on Ray, speculating asynchronously.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Answer = TypeVar("Answer")
DEFAULTS = ServeConfig()
DEFAULT_SPECULATION = '{"num_speculative_tokens": "auto"}'

Model = Annotated[str, typer.Option(help="smollm2, a Hugging Face directory, or a hub name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
Ca = Annotated[str | None, typer.Option(help="PEM certificates to trust; connects by TLS.")]
Cert = Annotated[str | None, typer.Option(help="This client's PEM certificate.")]
Key = Annotated[str | None, typer.Option(help="Its PEM key.")]
TokenPath = Annotated[str | None, typer.Option("--token-file", help="Its first word is sent as the bearer token.")]
Port = Annotated[int | None, typer.Option(help="Of the deployment that is meant; default: the newest.")]


@app.command()
def serve(
    model: Model = DEFAULTS.model,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it.")] = None,
    host: Annotated[str, typer.Option(help="Where gRPC listens.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="0: any free one.")] = DEFAULTS.port,
    tls_cert: Annotated[str | None, typer.Option(help="PEM chain; read again when it changes.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its PEM key, not encrypted.")] = None,
    tls_client_ca: Annotated[str | None, typer.Option(help="Demand clients' certificates of this authority.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")] = False,
    auth_token_file: Annotated[str | None, typer.Option(help="Lines of `TOKEN [TENANT] [limit=N]`.")] = None,
    admin_token_file: Annotated[str | None, typer.Option(help="Tokens for operators' calls alone.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Where metrics and the live page are.")] = DEFAULTS.metrics_host,
    metrics_port: Annotated[
        int | None, typer.Option(help="0: off; default: 9464, or any free one if that is taken.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = DEFAULTS.dtype,
    quantization: Annotated[str | None, typer.Option(help="int8: weights of 8 bits, on the CPU.")] = None,
    http: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of an OpenAI-compatible HTTP server, by smg.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = DEFAULTS.device,
    attention: Annotated[str, typer.Option(help="auto, cpu or triton.")] = DEFAULTS.attention,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once on a worker.")] = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of one step.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of one KV block.")] = DEFAULTS.block_size,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="KV blocks of a worker, on any device.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a GPU.")] = DEFAULTS.gpu_memory_utilization,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Share the KV of equal prefixes.")] = True,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = DEFAULTS.scheduling_policy,
    tensor_parallel_size: Annotated[int, typer.Option(help="1; more is not implemented.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="Workers.")] = DEFAULTS.data_parallel_size,
    max_steps_in_flight: Annotated[int, typer.Option(help="Per worker, 1 to 4.")] = DEFAULTS.max_steps_in_flight,
    threads: Annotated[int | None, typer.Option(help="Of one worker; default: (cores - 1) / workers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the seeds drawn for requests that bring none.")] = None,
    speculative_config: Annotated[str, typer.Option(help="A JSON object; null: no drafts.")] = DEFAULT_SPECULATION,
    max_waiting: Annotated[int, typer.Option(help="Queued requests before RESOURCE_EXHAUSTED.")] = DEFAULTS.max_waiting,
    max_waiting_tokens: Annotated[int | None, typer.Option(help="In tokens; default: 8 times the pools.")] = None,
    tenant_weights: Annotated[
        str | None, typer.Option(help='Shares of tenants that wait, as JSON: {"gold": 3}; 1 for others.')
    ] = None,
    record_events: Annotated[int, typer.Option(help="Scheduler events kept for `record`; 0: none.")] = 0,
    num_front_ends: Annotated[int, typer.Option(help="On ports counted up from --port.")] = DEFAULTS.num_front_ends,
    address: Annotated[str | None, typer.Option(help="HOST:PORT or auto: join this running Ray cluster.")] = None,
    transport: Annotated[str, typer.Option(help="To workers: ray (actor calls) or grpc.")] = DEFAULTS.transport,
    log_format: Annotated[str, typer.Option(help="text or json: one object a line.")] = DEFAULTS.log_format,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = DEFAULTS.log_level,
    log_file: Annotated[str | None, typer.Option(help="Of every process; default: each one's stderr.")] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what requests ask, too.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of an OpenTelemetry receiver over gRPC: a span per request.")
    ] = None,
    worker_down_after_s: Annotated[
        float, typer.Option(help="Silence after which a worker is lost.")
    ] = DEFAULTS.worker_down_after_s,
    fault_delay_ms: Annotated[
        str | None, typer.Option(help="For tests: MEAN, fixed:MS or uniform:LOW:HIGH of steps' messages.")
    ] = None,
    fault_repeat: Annotated[float, typer.Option(help="For tests: the share of them that comes twice.")] = 0.0,
    fault_reorder: Annotated[float, typer.Option(help="For tests: the share that is overtaken.")] = 0.0,
    fault_drop: Annotated[float, typer.Option(help="For tests: the share that is lost.")] = 0.0,
    fault_partition: Annotated[
        str | None, typer.Option(help="For tests: EVERY_S:FOR_S, how often and how long a worker is cut off.")
    ] = None,
    fault_seed: Annotated[int, typer.Option(help="Of all of these.")] = 0,
) -> int:
    """Serve a model over gRPC until Ctrl-C; prints `ready HOST:PORT` when it answers."""
    flags = dict(locals())
    speculative = SpeculativeConfig.from_json(flags.pop("speculative_config"))
    faults = Faults(**{name: flags.pop(f"fault_{name}") for name in Faults.__dataclass_fields__})
    http = flags.pop("http")
    config = ServeConfig(speculative=speculative, faults=faults, **flags)
    if http is not None and (tls_cert is not None or auth_token_file is not None):
        raise ConfigError("--http: smg reaches its servers with neither TLS nor tokens; leave out both")
    config.logs("serve")
    with StopSignals():
        try:
            _serve(config, http)
        except KeyboardInterrupt:
            pass
        except (BringUpError, ConfigError) as error:
            if not config.logs.is_for_machines:
                raise
            log.error(str(error))
            return 2 if isinstance(error, ConfigError) else 1
    return 0


def _serve(config: ServeConfig, http: int | None) -> None:
    if config.address is not None:
        prepare_to_join()
    from cluster.bringup import Deployment
    from cluster.gateway import Gateway, check_http

    adopt_orphans()
    if http is not None:
        check_http(config.host, http)
    display = Display(as_log=config.logs.is_for_machines)
    with display:
        directory = resolve_model(config.model, display)
        deployment = Deployment(config, directory, display.phase)
        display.warn(deployment.warnings)
    record: Path | None = None
    gateway: Gateway | None = None
    try:
        if http is not None:
            own = Path(deployment.ray.directory)
            gateway = Gateway(deployment.endpoints, directory=directory, host=config.host, port=http, own=own)
            with display, display.phase("Starting the HTTP server"):
                gateway.start()
            _print(f"http http://{gateway.address}/v1")
        record = running.record(deployment.endpoints, deployment.sizes.model_name, deployment.ray)
        for endpoint in deployment.metrics_endpoints:
            _print(f"metrics http://{endpoint}/metrics")
        for endpoint in deployment.metrics_endpoints[:1]:
            _print(f"page http://{endpoint}/")
        for endpoint in deployment.endpoints:
            _print(f"ready {endpoint}")
        while (ended := deployment.wait(WAIT_S)) is None:
            if gateway is not None and (gone := gateway.check()) is not None:
                raise BringUpError(gone)
        raise BringUpError(ended)
    finally:
        if gateway is not None:
            gateway.stop()
        deployment.stop()
        if record is not None:
            record.unlink(missing_ok=True)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    raw: Annotated[bool, typer.Option(help="Without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Outputs at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    seed: Annotated[int | None, typer.Option(help="Drawn when not given.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT; default: what runs on this machine.")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Stream one answer from the running server."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with _client(address or _running().endpoints[0], ca, cert, key, token_file) as client:
        turns = [{"role": "user", "content": prompt}]
        stream = client.generate(prompt, **options) if raw else client.chat(turns, **options)
        for output in _answered(lambda: iter(stream)):
            sys.stdout.write(output.text)
            sys.stdout.flush()
    _print("")


@app.command()
def status(
    as_json: AsJson = False,
    port: Port = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Workers, requests, blocks and acceptance of the running server."""
    from cluster.status_page import status_of, status_table

    deployment = _running(port)
    with _client(deployment.endpoints[0], ca, cert, key, token_file) as client:
        stats = _answer(client.stats)
    page = status_of(deployment, stats)
    if as_json:
        _print(json.dumps(page))
    else:
        Console().print(status_table(page))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame.")] = False,
    port: Port = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Workers' steps, blocks, latencies and requests of the running server, again every second."""
    from cluster.top import run_top

    deployment = _running(port)
    client = _client(deployment.endpoints[0], ca, cert, key, token_file)
    with client, StopSignals(), suppress(KeyboardInterrupt):

        def ask(after: int) -> dict[str, Any]:
            return _answer(lambda: client.view(after))

        run_top(ask, f"{deployment.model} on {', '.join(deployment.endpoints)}", once=once)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="Where to write it, for ui.perfetto.dev or chrome://tracing.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to look.")] = 5.0,
    port: Port = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Write a trace of steps, frames and messages of the running server, request ids included."""
    from cluster.trace import collect

    with ExitStack() as stack:
        clients = [_client(one, ca, cert, key, token_file) for one in _running(port).endpoints]

        def ask(client: "Client", after: int) -> dict[str, Any]:
            return _answer(lambda: client.view(after, frames=True))

        found = collect([partial(ask, stack.enter_context(client)) for client in clients], seconds)
    document = found.document()
    file.write_text(json.dumps(document))
    _print(f"{file}: {len(document['traceEvents'])} events")


@app.command()
def swap(
    directory: Annotated[Path, typer.Argument(help="A checkpoint of the same architecture.")],
    port: Port = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Go on with the weights of another checkpoint; streams that are open go on with them."""
    with _client(_running(port).endpoints[0], ca, cert, key, token_file) as client:
        _answer(lambda: client.swap_weights(str(directory.absolute())))
    _print(f"swapped to {directory}")


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="Where to write it.")],
    port: Port = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Write the running scheduler's latest events, prompts included (`serve --record-events N`)."""
    with _client(_running(port).endpoints[0], ca, cert, key, token_file) as client:
        content = _answer(client.recording)
    file.write_bytes(content)
    _print(f"{file}: {len(content)} bytes")


@app.command()
def replay(file: Annotated[Path, typer.Argument(help="A recording.")]) -> None:
    """Tell a recording's events to a scheduler again; exit code 1 if it now does something else."""
    from scheduler.record import replay as replay_recording

    try:
        num_events, divergence, scheduler = replay_recording(file)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if divergence is not None:
        raise ServerError(f"event {divergence.index} of {file} now makes other commands: {divergence.event}")
    scheduler.check()
    _print(f"{num_events} events, identical commands")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="For `ray up`, as in deploy/. Flags of `serve` may follow.")],
) -> None:
    """Bring a cluster up, start the server on its head, and print its endpoint."""
    from cluster.ray_up import RayUp

    cluster = RayUp.read(file)
    display = Display()
    with StopSignals(), display:
        endpoint = cluster.up(context.args, display.phase)
    tunnel = cluster.tunnel(endpoint)
    if tunnel is not None:
        _print(f"reach it by: {tunnel}")
    _print(f"ready {endpoint}")


@app.command()
def down(
    file: Annotated[Path | None, typer.Argument(help="What was given to `up`; without it: on this machine.")] = None,
    port: Port = None,
) -> None:
    """Stop the running server and every process it started, or a whole cluster."""
    if file is not None:
        from cluster.ray_up import RayUp

        display = Display()
        with StopSignals(), display:
            RayUp.read(file).down(display.phase)
        _print(f"took down {file}")
        return
    found = running.find(port)
    if found is None:
        raise ConfigError(_nothing_runs(port))
    running.take_down(*found)
    _print(f"stopped {', '.join(found[1].endpoints)}")


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="smollm2 or a hub name.")] = DEFAULTS.model) -> None:
    """Fetch a model into the cache; the last line is its directory."""
    display = Display()
    with StopSignals(), display:
        directory = resolve_model(model, display)
    _print(str(directory))


# What both commands that train a drafter take.
Answers = Annotated[int, typer.Option(help="Tokens of the model's own answers to learn from.")]
Prompts = Annotated[Path | None, typer.Option(help="One prompt a line; default: thousands of our own.")]
AnswerTokens = Annotated[int, typer.Option(help="Of one answer.")]
Epochs = Annotated[float, typer.Option(help="Times each answer is seen.")]
LearningRate = Annotated[float, typer.Option(help="At its highest.")]
EveryCore = Annotated[int | None, typer.Option(help="Default: every core.")]
TrainingSeed = Annotated[int, typer.Option(help="Of prompts, answers and training.")]


@app.command("train-head")
def train_head(
    output: Annotated[Path, typer.Argument(help="Directory of the head; OUTPUT.run keeps what is needed to go on.")],
    model: Model = DEFAULTS.model,
    tokens: Answers = 250_000,
    prompts: Prompts = None,
    max_tokens: AnswerTokens = 256,
    epochs: Epochs = 8.0,
    depth: Annotated[int, typer.Option(help="Of the training-time test.")] = 3,
    draft_vocab_size: Annotated[int, typer.Option(help="Tokens the head can draft.")] = 8192,
    learning_rate: LearningRate = 2e-3,
    threads: EveryCore = None,
    seed: TrainingSeed = 0,
) -> None:
    """Train an EAGLE-3 draft head for a model on this machine; run it again to go on after an interruption."""
    threads = _restarted(threads)
    display = Display()
    with StopSignals(), display:
        directory = resolve_model(model, display)
        from cluster.sampled_texts import TextRequest, state_layers_of  # these import torch
        from cluster.train_head import HeadRequest
        from cluster.train_head import train_head as run
        from worker.draft_training import Training

        layers = state_layers_of(directory)
        training = Training(
            state_layers=layers, draft_vocab_size=draft_vocab_size, epochs=epochs, depth=depth,
            learning_rate=learning_rate, seed=seed,
        )  # fmt: skip
        texts = TextRequest(
            directory=directory, name=model, num_tokens=tokens, max_tokens=max_tokens, prompts=prompts,
            state_layers=layers, seed=seed,
        )  # fmt: skip
        score = run(HeadRequest(texts=texts, output=output, training=training, threads=threads), display)
    _print_score(output, score)


@app.command("distill-draft")
def distill_draft(
    output: Annotated[Path, typer.Argument(help="Directory of the model; OUTPUT.run keeps what is needed to go on.")],
    model: Model = DEFAULTS.model,
    texts_of: Annotated[Path | None, typer.Option(help="A .run of train-head whose answers to take.")] = None,
    tokens: Answers = 250_000,
    prompts: Prompts = None,
    max_tokens: AnswerTokens = 256,
    epochs: Epochs = 8.0,
    layers: Annotated[int, typer.Option(help="Of the draft model.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the draft model; a multiple of 64.")] = 192,
    learning_rate: LearningRate = 2e-3,
    threads: EveryCore = None,
    seed: TrainingSeed = 0,
) -> None:
    """Distill a tiny draft model from a model on this machine; run it again to go on after an interruption."""
    threads = _restarted(threads)
    display = Display()
    with StopSignals(), display:
        directory = resolve_model(model, display)
        from cluster.distill_draft import DraftRequest  # these import torch
        from cluster.distill_draft import distill_draft as run
        from cluster.sampled_texts import TextRequest, state_layers_of
        from worker.draft_distillation import Distillation

        training = Distillation(
            num_layers=layers, hidden_size=hidden_size, epochs=epochs, learning_rate=learning_rate, seed=seed
        )
        texts = TextRequest(
            directory=directory, name=model, num_tokens=tokens, max_tokens=max_tokens, prompts=prompts,
            state_layers=state_layers_of(directory), seed=seed,
        )  # fmt: skip
        request = DraftRequest(texts=texts, texts_of=texts_of, output=output, training=training, threads=threads)
        score = run(request, display)
    _print_score(output, score)


def _restarted(threads: int | None) -> int:
    """Threads to compute on, once this process has the environment for them."""
    from cluster.sizing import num_cpus
    from worker.process import environment, restart_with

    threads = threads or num_cpus()
    restart_with(environment(threads))
    return threads


def _print_score(output: Path, score: "Score") -> None:
    shares = " / ".join(f"{share:.2f}" for share in score.accepted)
    _print(f"{output}: accepted {shares}, {score.acceptance_length:.2f} tokens at K = {len(score.accepted)}")


@app.command()
def demo(
    as_json: AsJson = False,
    model: Model = DEFAULTS.model,
    workers: Annotated[int, typer.Option(help="Worker actors.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Outputs of each prompt at most.")] = 96,
) -> None:
    """Start a cluster on this machine, stream eight chats from it side by side, and stop it again."""
    from cluster.demo import run_demo

    adopt_orphans()
    config = ServeConfig(model=model, data_parallel_size=workers, port=0)
    with StopSignals():
        run_demo(config, max_tokens=max_tokens, as_json=as_json)


@app.command()
def bench(
    dataset: Annotated[str, typer.Option(help="chat, copy, code-edit, or a file with one prompt a line.")] = "chat",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    request_rate: Annotated[
        float, typer.Option(help="Per second, at random (Poisson); inf: all at once, as --max-concurrency allows.")
    ] = float("inf"),
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests under way at once.")] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Prompts of exactly so many meaningless tokens instead.")
    ] = None,
    output_len: Annotated[int, typer.Option(min=1, help="Outputs of each request at most.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Outputs of exactly --output-len.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and sampling.")] = 0,
    goal_ttft_ms: Annotated[float | None, typer.Option(help="A good request's first token comes so soon.")] = None,
    goal_itl_ms: Annotated[float | None, typer.Option(help="And its others so close, on average.")] = None,
    backend: Annotated[str, typer.Option(help="slipstream or openai.")] = "slipstream",
    base_url: Annotated[str | None, typer.Option(help="Of --backend openai: http://HOST:PORT/v1.")] = None,
    model: Annotated[str, typer.Option(help="The name to ask --backend openai for.")] = DEFAULTS.model,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    as_json: AsJson = False,
    address: Annotated[str | None, typer.Option(help="HOST:PORT; default: what runs on this machine.")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenPath = None,
) -> None:
    """Measure a running server under load: times to tokens, tokens per second, goodput, acceptance."""
    from cluster.bench import GrpcBackend, Load, OpenAIBackend
    from cluster.bench_prompts import prompts_of, random_prompts
    from cluster.bench_run import Run

    if backend not in ("slipstream", "openai"):
        raise ConfigError(f"--backend must be slipstream or openai, got {backend!r}")
    if (backend == "openai") != (base_url is not None):
        raise ConfigError("--base-url goes with --backend openai, and the other way round")
    if backend == "openai" and input_len is not None:
        raise ConfigError("--input-len sends token ids, which --backend openai does not take")
    if not request_rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {request_rate}")
    run = Run(goal_ttft_ms=goal_ttft_ms, goal_itl_ms=goal_itl_ms, html=html, as_json=as_json)

    def load(prompts: "list[Prompt]") -> Load:
        return Load(
            prompts=prompts, max_tokens=output_len, request_rate=request_rate, max_concurrency=max_concurrency,
            temperature=temperature, ignore_eos=ignore_eos, seed=seed,
        )  # fmt: skip

    if base_url is not None:
        run(OpenAIBackend(base_url, model), load(prompts_of(dataset, num_prompts, seed)))
        return
    with _client(address or _running().endpoints[0], ca, cert, key, token_file) as client:
        exact = None if input_len is None else random_prompts(num_prompts, input_len, seed)
        run(GrpcBackend(client), load(exact or prompts_of(dataset, num_prompts, seed)))


@app.command()
def stress(
    seconds: Annotated[float, typer.Option(help="How long streams are begun.")] = 60.0,
    kill: Annotated[str, typer.Option(help="Any of worker,scheduler,frontend; each in its turn.")] = "",
    kill_every_s: Annotated[float, typer.Option(help="From one being back to the next.")] = 6.0,
    delay: Annotated[bool, typer.Option("--delay", help="Steps' messages come late.")] = False,
    repeat: Annotated[bool, typer.Option("--repeat", help="Some come twice.")] = False,
    reorder: Annotated[bool, typer.Option("--reorder", help="Some are overtaken.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Some are lost.")] = False,
    partition: Annotated[bool, typer.Option("--partition", help="Workers are cut off now and then.")] = False,
    preempt: Annotated[bool, typer.Option("--preempt", help="Requests are taken off their workers.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="The KV of running requests is reset.")] = False,
    transport: Annotated[str, typer.Option(help="To workers: ray (actor calls) or grpc.")] = DEFAULTS.transport,
    model: Model = DEFAULTS.model,
    dtype: Annotated[str, typer.Option(help="float32: greedy streams are held against transformers.")] = "float32",
    workers: Annotated[int, typer.Option(help="Worker actors.")] = 3,
    num_front_ends: Annotated[int, typer.Option(help="Each has clients of its own.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Streams at once.")] = 12,
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and output together.")] = 256,
    threads: Annotated[int, typer.Option(help="Of one worker.")] = 1,
    seed: Annotated[int, typer.Option(help="Of requests, faults and kills.")] = 0,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a server running on this machine, started with the same flags.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Load a deployment, break it in the chosen ways, and verify every stream; exit code 1 on any violation."""
    adopt_orphans()
    from cluster.stress import StressConfig, run_stress

    kinds = tuple(kind for kind in kill.split(",") if kind)
    wished = {"delay": delay, "repeat": repeat, "reorder": reorder, "drop": drop, "partition": partition}
    if address is not None and any(wished.values()):
        raise ConfigError("--address: messages are disturbed by the server itself; start it with --fault-...")
    found = None if address is None else _running(int(address.rpartition(":")[2]))
    config = StressConfig(
        serve=ServeConfig(
            model=model,
            dtype=dtype,
            data_parallel_size=workers,
            num_front_ends=num_front_ends,
            port=0,
            metrics_port=0,
            max_num_seqs=8,
            max_model_len=max_model_len,
            # Tight enough that requests are preempted for lack of blocks.
            num_gpu_blocks_override=3 * -(-max_model_len // DEFAULTS.block_size) // 2,
            threads=threads,
            transport=transport,
            faults=stress_faults(wished, seed),
        ),
        endpoints=() if found is None else found.endpoints,
        root=None if found is None else found.pid,
        seconds=seconds,
        kill=kinds,
        kill_every_s=kill_every_s,
        preempt=preempt,
        reset=reset,
        concurrency=concurrency,
        seed=seed,
    )
    with StopSignals():
        return run_stress(config, as_json=as_json)


def _client(address: str, ca: str | None, cert: str | None, key: str | None, token_file: str | None) -> "Client":
    """Tokens come from files: what is on a command line is seen by everyone on the machine."""
    from cluster.client import Client

    try:
        token = None if token_file is None else Path(token_file).read_text().split()[0]
        return Client(address, ca=ca, cert=cert, key=key, token=token)
    except OSError as error:
        raise ConfigError(f"--token-file {token_file} cannot be read: {error.strerror}") from error
    except IndexError as error:
        raise ConfigError(f"--token-file {token_file} is empty") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _running(port: int | None = None) -> running.Running:
    found = running.find(port)
    if found is None or not found[1].alive:
        raise ConfigError(_nothing_runs(port))
    return found[1]


def _nothing_runs(port: int | None) -> str:
    where = "on this machine" if port is None else f"on --port {port}"
    return f"no server runs {where}; start one with `slipstream serve`"


def _answered(ask: Callable[[], Iterable[Answer]]) -> Iterator[Answer]:
    """What the server answers, its refusals turned into one line."""
    import grpc

    from cluster.status import told

    try:
        yield from ask()
    except grpc.RpcError as error:
        refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        raise (ConfigError if refused else ServerError)(told(error)) from error


def _answer(ask: Callable[[], Answer]) -> Answer:
    """One answer, likewise."""
    [answer] = _answered(lambda: [ask()])
    return answer


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point `slipstream`."""
    prepare()
    sys.exit(_run(lambda: app(args=arguments, standalone_mode=False)))


def _run(command: Callable[[], object]) -> int:
    """The exit code: 0, 1 for what failed, 2 for what was asked wrongly, 130 for an interruption."""
    try:
        code = command()
    except TyperException as error:
        return _fail(error.format_message(), 2)
    except ConfigError as error:
        return _fail(str(error), 2)
    except (BringUpError, ServerError) as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    first, _, more = message.partition("\n")
    sys.stderr.write(f"error: {first.strip()}{' ...' if more.strip() else ''}\n")
    return code


if __name__ == "__main__":
    main()
