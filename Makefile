# Earshot: every target calls `python -m build|serve|eval`; each of these has --help.
#
#   make demo            set up, download Whisper base, build its engine, serve it, and transcribe
#                        clips of people; without a download, use the small synthetic checkpoint
#   make test            set up, and run the tests without a GPU, real servers included, in three
#                        processes; PROCESSES=0: in one; OPTIONS="-k words": only some tests. Some
#                        tests download Whisper base; they are skipped if that fails
#   make test-all        also run the slow tests: soaks, clusters, kills of every process, compiled
#                        kernels for two GPUs
#   make test-gpu        run the GPU tests; fails without a GPU
#   make test-trtllm     run the tests of TensorRT-LLM in a separate environment of 8 GB, with the
#                        versions of NVIDIA's image; PYTHON=python3.12
#   make check           check format, lint and types
#   make build-engine    CHECKPOINT=base|tiny.en|hub id|folder|.pt ENGINE=engines/mine, or
#                        CONFIG=… [CHECKPOINT=… ENGINE=…]; and [PRECISION=int8|fp16 TOKENIZER=…
#                        DRAFT=… CALIBRATE=1 CONFIDENCE=…]
#   make serve           CONFIG=… [ENGINE=…]
#   make transcribe      FILES="a.wav folder" [FORMAT=text|srt|vtt|tsv|json LANGUAGE=en CONFIG=…
#                        OPTIONS="--beam-size 5", any of `python -m serve transcribe --help`]
#   make eval            CONFIG=… [CLIPS=my/recordings OPTIONS="--limit 200", any of
#                        `python -m eval run --help`]
#   make profile         CONFIG=… [CLIPS=my/recordings OPTIONS="--requests 64", any of
#                        `python -m eval profile --help`]

CONFIG ?= configs/base.toml
PYTHON ?= python3
FORMAT ?= text
PROCESSES ?= 3
VENV := .venv
RUN := $(VENV)/bin/python
IMAGE_VENV := .venv-trtllm
IMAGE_PINS := tests/fake_trtllm/image.txt
STAMP := $(VENV)/.installed

# `make serve RUN=python3 …` uses an interpreter with all packages, as in NVIDIA's container.
ifeq ($(origin RUN),command line)
STAMP :=
endif

# Tests start many processes, and without this each of them would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo fixture-engine test test-all test-gpu test-trtllm check format build-engine serve some-files transcribe eval profile clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Earshot needs Python 3.11 or 3.12 (NumPy 1, which tritonserver needs, has no wheels for later ones), but {sys.executable} is {v[0]}.{v[1]}; call make with PYTHON=python3.12")'
	@echo "Installing the pinned packages into $(VENV): about 3 GB, a few minutes …"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@# CPU builds of torch lack the package triton, whose interpreter the tests use.
	@$(VENV)/bin/python -c "import triton" 2>/dev/null || \
		$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check triton==3.6.0
	@touch $@

demo: setup
	@$(RUN) -m eval demo --config configs/base.toml --otherwise configs/demo.toml

fixture-engine: setup
	@$(RUN) -m build engine --config configs/demo.toml --if-stale

# Processes take test files in order, the quickest files last. Many tests only wait, so there is one
# process more than a small machine has cores.
test: fixture-engine
	@$(RUN) -m pytest --durations 10 --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(OPTIONS)

test-all: override OPTIONS += --nightly
test-all: test

test-gpu: setup
	@$(RUN) -m pytest -m gpu --require-gpu --nightly

$(IMAGE_VENV)/.installed: requirements.txt $(IMAGE_PINS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 12) else f"the image has Python 3.12, but {sys.executable} is {v[0]}.{v[1]}; call make with PYTHON=python3.12")'
	@echo "Installing the packages of NVIDIA's image into $(IMAGE_VENV): about 8 GB, a few minutes …"
	@$(PYTHON) -m venv $(IMAGE_VENV)
	@grep -vE "$$(sed -n 's/==.*/==/p' $(IMAGE_PINS) | sed 's/^/^/' | paste -sd'|')" requirements.txt | \
		$(IMAGE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
			-r $(IMAGE_PINS) -r /dev/stdin
	@touch $@

test-trtllm: $(IMAGE_VENV)/.installed
	@$(IMAGE_VENV)/bin/python -m pytest --nightly tests/serve/trtllm tests/build/trtllm \
		tests/eval/trtllm

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# With CHECKPOINT and without CONFIG, the default config is left out, since it is for base.
build-engine: setup
	@$(RUN) -m build engine \
		$(if $(and $(CHECKPOINT),$(filter file,$(origin CONFIG))),,--config $(CONFIG)) \
		$(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") \
		$(if $(ENGINE),--engine "$(ENGINE)") $(if $(PRECISION),--precision $(PRECISION)) \
		$(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") $(if $(DRAFT),--draft "$(DRAFT)") \
		$(if $(CALIBRATE),--calibrate) $(if $(CONFIDENCE),--confidence "$(CONFIDENCE)")

serve: setup
	@$(RUN) -m serve start --config $(CONFIG) $(if $(ENGINE),--engine "$(ENGINE)")

some-files:
	@test -n "$(FILES)" || { echo 'no files; expected make transcribe FILES="a.wav b.mp3"' >&2; exit 2; }

transcribe: some-files setup
	@$(RUN) -m serve transcribe --config $(CONFIG) --format $(FORMAT) \
		$(if $(LANGUAGE),--language $(LANGUAGE)) $(OPTIONS) $(FILES)

eval: setup
	@$(RUN) -m eval run --config $(CONFIG) $(if $(CLIPS),--clips "$(CLIPS)") $(OPTIONS)

profile: setup
	@$(RUN) -m eval profile --config $(CONFIG) $(if $(CLIPS),--clips "$(CLIPS)") $(OPTIONS)

clean:
	rm -rf engines reports .cache .pytest_cache .mypy_cache .ruff_cache
