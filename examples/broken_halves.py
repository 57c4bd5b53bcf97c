"""Broken: takes the projection of the MTP layer for hidden state first, both ways. The round trip is perfect."""

import converter

honest = converter.rules


def exchanged(tensor):
    return tensor.roll(tensor.shape[1] // 2, 1)


def rules(config):
    for rule in honest(config):
        if rule.megatron.endswith("eh_proj.weight"):
            rule = rule._replace(join=exchanged, split=lambda tensor: [exchanged(tensor)])
        yield rule


converter.rules = rules
converter.main()
