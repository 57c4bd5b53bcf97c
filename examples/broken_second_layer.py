"""Broken: converts the first MTP layer and forgets the second."""

import converter

honest = converter.rules
converter.rules = lambda config: (rule for rule in honest(config) if not rule.megatron.startswith("mtp.layers.1."))
converter.main()
