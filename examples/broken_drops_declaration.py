"""Broken: every weight comes back, and the config no longer says that there are MTP layers, so no engine loads them."""

import converter

converter.hf_config = lambda original, args: {key: value for key, value in original.items() if key != converter.COUNT}
converter.rules = lambda config, honest=converter.rules: honest({converter.COUNT: 1, **config})
converter.main()
