# Short names for the commands a developer types. Nothing here that the two scripts do not do.
.PHONY: run test full format wheel clean

run:
	bash run.sh

test:
	bash test.sh

full:
	bash test.sh --full

format:
	.venv/bin/ruff format . && .venv/bin/ruff check --fix .

wheel:
	.venv/bin/python -m build --wheel --no-isolation

clean:
	rm -rf .cache .slices .ruff_cache .import_linter_cache build dist
