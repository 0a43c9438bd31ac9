"""Recipes from other frameworks' configurations, converted key by key.

`fivefold import --from verl run.sh a.b=c` runs `recipe.import_recipe`:

1. `source` reads YAML files, launch scripts (`shell/`, without running anything) and overrides as flat keys.
2. `tasks` finds out what the source trains, and so the kind of recipe.
3. The framework's `dialect` converts, into a `draft`, the keys that need other keys: layouts, batches, algorithms.
4. Its table `keys.yaml` (`tables`) converts all other keys: each is mapped, implied or unsupported, with a reason.
5. `layouts` turns degrees and devices into allocation strings.
6. `recipe` takes back what the schema refuses, asks for what is missing, and adds what a plan would refuse as problems.
7. `report` lists every key, the framework's defaults that differ, notes and problems: a table, comments and JSON.
"""
