"""``python -m ds_tba``: the same as the command ``ds_tba``."""

from ds_tba.cli import main

raise SystemExit(main())
