# One surface for every command; `make help` lists them. CMakePresets.json has the build settings.
.DEFAULT_GOAL := help
SHELL := bash
PRESET ?= release

.PHONY: help build test cudatest bench lint tidy format sanitize fuzz bundle clean

help: ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'
	@echo
	@echo '  ./run     set up what serving needs, build, serve models/demo'
	@echo '  ./test    set up what the tests need, build, lint, test'

build: ## build everything (PRESET=release, debug, asan, tsan or cuda)
	@[ -f build/$(PRESET)/build.ninja ] || cmake --preset $(PRESET)
	@cmake --build build/$(PRESET)

test: ## build, lint and run every CPU test
	@./test

cudatest: ## every check that needs a CUDA device (about five minutes)
	@[ -f build/cuda/build.ninja ] || cmake --preset cuda
	@cmake --build build/cuda --target tessera cuda_tests && tests/cuda/run.sh build/cuda

bench: build ## the engine's speed beside this machine's own limits
	@build/$(PRESET)/tessera bench engine models/demo

lint: ## layers, sizes, banned words, dead files, links, format
	@python3 -B tools/lint/lint.py

tidy: ## clang-tidy on the files that changed since BASE=HEAD (slow); FILES="a.cc b.cc" names them
	@tools/lint/tidy.sh $(if $(FILES),$(FILES),--since $(or $(BASE),HEAD))

format: ## clang-format every C++ file
	@git ls-files -z --cached --others --exclude-standard '*.cc' '*.h' '*.cu' '*.cuh' | xargs -0 clang-format-19 -i

sanitize: ## ASan with UBSan, then TSan, on the layers with threads and raw memory (SANITIZERS="asan tsan")
	@tools/setup/sanitize.sh $(or $(SANITIZERS),asan tsan)

fuzz: ## each fuzzer on its seeds and for FUZZ_SECONDS=10
	@tools/setup/fuzz.sh $(FUZZERS)

bundle: ## dist/: the stripped binary and its libraries for another machine (MODEL=models/demo adds a model; PRESET=cuda)
	@PRESET=$(PRESET) tools/setup/bundle.sh $(MODEL)

clean: ## remove build/ and dist/
	@rm -rf build dist
