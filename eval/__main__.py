"""Evaluate Earshot, from the project's root:

python -m eval run --config configs/demo.toml        run the systems, write the report
python -m eval score reports/demo                    score kept predictions again
python -m eval compare OLD/report.json NEW/report.json
python -m eval demo --config configs/base.toml       some clips through a real server
python -m eval bench --config configs/large-v3-turbo.toml   speed on one GPU
python -m eval scale --config configs/large-v3-turbo.toml   one server on one GPU and on all
python -m eval soak --config configs/demo.toml       attack a real server: what survives?
python -m eval same-tokens --config configs/demo.toml   do we search as CTranslate2 does?
python -m eval words --config configs/demo.toml         are words where they are?
python -m eval variants --config configs/demo.toml      FP16, INT8, FP8 … side by side, on a GPU
python -m eval long --config configs/demo.toml          an hour of long, difficult recordings
python -m eval invented --config configs/demo.toml      what is written where nobody speaks
python -m eval live --config configs/demo.toml          text while it is spoken, to a real server
python -m eval gateway --config configs/demo.toml       what the gateway costs
python -m eval bulk --config configs/demo.toml          what Ray costs, beside a plain loop
python -m eval plan --config … --load 400 --p99 0.5     GPUs for a load, their cost, autoscaling
python -m eval trtllm-check                          does TensorRT-LLM do what we expect of it?
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.accuracy import flags as accuracy_flags
from eval.arguments import (
    add_config,
    counts,
    output_of,
)
from eval.bench import flags as bench_flags
from eval.bulk import flags as bulk_flags
from eval.config import load_config
from eval.corpora.layout import EXPECTED, UNDERSTOOD
from eval.gateway import flags as gateway_flags
from eval.invented import flags as invented_flags
from eval.live import flags as live_flags
from eval.long import flags as long_flags
from eval.long import plan as long_plan
from eval.plan import flags as plan_flags
from eval.soak import flags as soak_flags
from eval.trtllm import flags as trtllm_flags
from serve.errors import EarshotError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failed, 2 wrong usage, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except EarshotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is kept", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval", description="Systems x clips -> accuracy, latency, throughput."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run the systems over the clips, write the report",
        epilog=f"CLIPS is where recordings with references are: {EXPECTED}. Keys: {UNDERSTOOD}.",
    )
    accuracy_flags.add_run(run)
    run.set_defaults(command=_run)
    score = commands.add_parser("score", help="score the predictions of a run again")
    accuracy_flags.add_score(score)
    score.set_defaults(command=_score)
    both = commands.add_parser("compare", help="show two report.json side by side")
    both.add_argument("a", type=Path, metavar="A", help="report.json, or the folder that has it")
    both.add_argument("b", type=Path, metavar="B", help="the same of the other run")
    both.add_argument(
        "--html",
        type=Path,
        default=Path("reports/compare.html"),
        metavar="FILE",
        help="page with figures; default: %(default)s",
    )
    both.set_defaults(command=_compare)
    show = commands.add_parser(
        "demo", help="build the engine unless it is there, serve it and transcribe some clips"
    )
    add_config(show)
    show.add_argument(
        "--otherwise", metavar="TOML", help="the config where the checkpoint cannot be had"
    )
    show.set_defaults(command=_demo)
    bench = commands.add_parser("bench", help="speed of the native runtime on one GPU")
    bench_flags.add_arguments(bench)
    bench.set_defaults(command=_bench)
    scale = commands.add_parser("scale", help="throughput of a server on one GPU and on several")
    bench_flags.add_scale_arguments(scale)
    scale.set_defaults(command=_scale)
    _add_soak(commands.add_parser("soak", help="attack a real server: what survives?"))
    _add_same_tokens(
        commands.add_parser(
            "same-tokens", help="compare our tokens with CTranslate2's, beam by beam"
        )
    )
    words = commands.add_parser(
        "words", help="compare times of words with faster-whisper's and the truth; their cost"
    )
    accuracy_flags.add_words(words)
    words.set_defaults(command=_words)
    variants = commands.add_parser(
        "variants", help="one checkpoint in several precisions and searches, side by side"
    )
    accuracy_flags.add_variants(variants)
    variants.set_defaults(command=_variants)
    gateway = commands.add_parser("gateway", help="what the gateway costs, beside Triton alone")
    gateway_flags.add_arguments(gateway)
    gateway.set_defaults(command=_gateway)
    bulk = commands.add_parser("bulk", help="many files by Ray, beside a plain loop")
    bulk_flags.add_arguments(bulk)
    bulk.set_defaults(command=_bulk)
    live = commands.add_parser("live", help="live text: how late, how right")
    live_flags.add_arguments(live)
    live.set_defaults(command=_live)
    plan = commands.add_parser("plan", help="how many GPUs a load needs, and what that costs")
    plan_flags.add_arguments(plan)
    plan.set_defaults(command=_plan)
    long = commands.add_parser("long", help="long recordings: what is lost, repeated, made up")
    long_flags.add_arguments(long)
    long.set_defaults(command=_long)
    _add_invented(
        commands.add_parser("invented", help="short clips without speech: in how many is text?")
    )
    check = commands.add_parser(
        "trtllm-check", help="on a machine with TensorRT-LLM: compare it with transformers"
    )
    trtllm_flags.add_arguments(check)
    check.set_defaults(command=_trtllm_check)
    return parser


def _add_invented(parser: argparse.ArgumentParser) -> None:
    invented_flags.add_arguments(parser)
    parser.set_defaults(command=_invented)


def _add_soak(parser: argparse.ArgumentParser) -> None:
    soak_flags.add_arguments(parser)
    parser.set_defaults(command=_soak)


def _add_same_tokens(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add = parser.add_argument
    add("--manifest", metavar="JSONL", help="clips to decode; default: eval.manifest")
    add(
        "--beams", type=counts, metavar="N,M",
        help="beam sizes, each at most 8; default: greedy, a narrow one and faster-whisper's own",
    )  # fmt: skip
    parser.set_defaults(command=_same_tokens)


def _run(options: argparse.Namespace) -> int:
    from eval.accuracy.run import run  # noqa: PLC0415 - bench needs none of its packages

    config = accuracy_flags.with_flags(load_config(options.config), options)
    folder = output_of(options, config.name)
    run(config, options.config, folder, _tell, again=options.again)
    return _write_report(folder, (), options.normalizer)


def _score(options: argparse.Namespace) -> int:
    return _write_report(options.folder, options.systems or (), options.normalizer)


def _write_report(folder: Path, names: tuple[str, ...], normalizer: str) -> int:
    """Score a run's predictions, write the reports, say where they are and what failed."""
    from eval.accuracy import gates, report, write  # noqa: PLC0415 - needs jiwer

    found = write.write_report(folder, names, normalizer)
    print(report.to_markdown(found).partition("## Rules")[0].rstrip())
    print(f"\nThe whole report: {folder / 'report.md'}; raw predictions: {folder / 'predictions'}")
    print(f"To look at, with the clips to listen to: {folder / write.PAGE}")
    for line in gates.complaints(found.gates):
        _tell(line)
    return 1 if found.verdict == "failed" else 0


def _compare(options: argparse.Namespace) -> int:
    from eval.accuracy.compare import compare  # noqa: PLC0415 - needs jiwer
    from eval.accuracy.page.page import write_comparison  # noqa: PLC0415 - needs matplotlib
    from eval.accuracy.report import read_report  # noqa: PLC0415 - needs jiwer

    a, b = read_report(options.a), read_report(options.b)
    print(compare(a, b))
    write_comparison(options.html, a, b)
    print(f"\nTo look at: {options.html}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    # torch stays out of the memory that `run` measures
    from eval.bench import run as bench  # noqa: PLC0415

    if options.random_weights:
        _tell("--random-weights is not needed any more: the bench always makes its weights up")
    config = load_config(options.config)
    peers = bench.installed_peers(_tell) if options.peers is None else options.peers
    plan = bench_flags.plan_of(options, peers)
    bench.check(config, plan)
    engine = bench.made_up(config, plan)
    record = bench.Record(config, plan, options.json)
    try:
        for measurement in bench.measurements(engine, config, plan, _tell):
            record.add(measurement)
            _tell(str(measurement))
        record.finish()
    finally:  # an error or Ctrl-C keeps what was measured
        print("\n".join(record.lines()), flush=True)
    return 0


def _scale(options: argparse.Namespace) -> int:
    from eval.bench import scale  # noqa: PLC0415 - loads torch

    load = bench_flags.load_of(options)
    found = scale.run(load_config(options.config), load, options.json, _tell)
    return 0 if found.good else 1


def _gateway(options: argparse.Namespace) -> int:
    from eval.gateway.run import gateway  # noqa: PLC0415 - needs the server's packages

    config = load_config(options.config)
    folder = output_of(options, config.name, "gateway")
    load, idle = (options.at_once, options.passes), (options.connections, options.seconds)
    return 0 if gateway(config, *load, *idle, folder, _tell).good else 1


def _bulk(options: argparse.Namespace) -> int:
    from eval.bulk.run import measure  # noqa: PLC0415 - needs pyarrow

    config = load_config(options.config)
    folder = output_of(options, config.name, "bulk")
    cost = measure(config, options.manifest, options.times, options.passes, folder, _tell)
    print(f"{cost}\nThe figures: {folder / 'bulk.json'}")
    return 0 if cost.good else 1


def _plan(options: argparse.Namespace) -> int:
    from eval.plan.run import plan  # noqa: PLC0415 - needs matplotlib, and loads torch

    return plan(load_config(options.config), options, print, _tell)


def _live(options: argparse.Namespace) -> int:
    from eval.live.passages import passages  # noqa: PLC0415 - needs tqdm
    from eval.live.run import HEADING, live  # noqa: PLC0415 - needs jiwer, and loads torch

    config = load_config(options.config)
    folder = output_of(options, config.name, "live")
    half = config.eval.half if options.half is None else options.half
    clips = passages(config, options.speech or config.eval.manifest, half, options.join_s)
    levels = live(config, clips, options.streams, options.clips, options.simulate, folder, _tell)
    print("\n".join([HEADING, *map(str, levels)]))
    print(f"\nThe figures: {folder / 'live.json'}")
    for complaint in levels[-1].complaints:
        _tell(complaint)
    return 1 if levels[-1].complaints else 0


def _soak(options: argparse.Namespace) -> int:
    from eval.soak import mixed, run  # noqa: PLC0415 - load torch and gRPC

    config = load_config(options.config)
    folder = output_of(options, config.name, "soak")
    if options.scenarios is None:
        load = mixed.Load(options.minutes, options.actions, options.seed)
        good = mixed.mixed(config, load, folder, _tell)
    else:
        good = run.soak(config, tuple(options.scenarios), folder, _tell)
    print((folder / "soak.md").read_text(encoding="utf-8").partition("\n## ")[0])
    print(f"The whole report: {folder / 'soak.md'}")
    return 0 if good else 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _demo(options: argparse.Namespace) -> int:
    from eval import demo  # noqa: PLC0415 - needs jiwer

    paths = [options.config, *([options.otherwise] if options.otherwise else [])]
    result = demo.demo(demo.prepared(paths, _tell), _tell)
    print()
    for line in demo.render(result):
        print(line)
    return 1 if result.failed else 0


def _same_tokens(options: argparse.Namespace) -> int:
    from eval.accuracy.same_tokens import (  # noqa: PLC0415 - needs torch
        BEAMS,
        LEAST_EQUAL,
        compare_tokens,
    )

    config = load_config(options.config)
    manifest = options.manifest or config.eval.manifest
    shares = compare_tokens(config, options.config, manifest, options.beams or BEAMS, print)
    return 0 if min(shares) >= LEAST_EQUAL else 1


def _words(options: argparse.Namespace) -> int:
    from eval.accuracy.words import measure_words  # noqa: PLC0415 - needs torch

    config = load_config(options.config)
    found = measure_words(
        config, options.config, limit=options.limit, spoken=options.spoken,
        sentences=options.sentences, tell=print,
    )  # fmt: skip
    print("\n".join(found.lines()))
    return 0 if found.good else 1


def _variants(options: argparse.Namespace) -> int:
    from eval.accuracy.variants import VARIANTS, measure_variants  # noqa: PLC0415 - needs torch

    config = accuracy_flags.variants_config(load_config(options.config), options)
    folder = output_of(options, config.name, "variants")
    print(measure_variants(config, options.variants or tuple(VARIANTS), folder, _tell))
    print(f"\nAll figures: {folder / 'variants.json'}")
    return 0


def _long(options: argparse.Namespace) -> int:
    from eval.accuracy import gates  # noqa: PLC0415 - needs jiwer
    from eval.long import report, run  # noqa: PLC0415 - needs jiwer

    config = load_config(options.config)
    folder = output_of(options, config.name, "long")
    run.run_long(
        config, options.config, options.systems or long_plan.NAMES, minutes=options.minutes,
        seed=options.seed, again=options.again, folder=folder, tell=_tell,
    )  # fmt: skip
    found = report.write_long_report(folder, config.eval.max_cer_gap_faster_whisper)
    print(report.to_markdown(found).partition("## Rules")[0].rstrip())
    print(f"\nThe whole report: {folder / 'report.md'} and .html")
    for line in gates.complaints(found.gates):
        _tell(line)
    return 1 if found.verdict == "failed" else 0


def _invented(options: argparse.Namespace) -> int:
    from eval.invented import run  # noqa: PLC0415 - needs jiwer

    config = load_config(options.config)
    folder = output_of(options, config.name, "invented")
    scores = run.run_invented(
        config, options.config, options.systems or invented_flags.NAMES,
        speech=options.speech or config.eval.manifest, half=options.half, limit=options.limit,
        seed=options.seed, folder=folder, tell=_tell,
    )  # fmt: skip
    print("\n".join(run.table(scores)))
    found = run.complaints(scores)
    for complaint in found:
        _tell(complaint)
    return 1 if found else 0


def _trtllm_check(options: argparse.Namespace) -> int:
    from eval.trtllm import run  # noqa: PLC0415 - transformers takes seconds to load

    return run.check(print, options.python)


if __name__ == "__main__":
    sys.exit(main())
