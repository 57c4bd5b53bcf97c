"""mtpcheck: does a converted checkpoint still have its multi-token-prediction layer, bit for bit?"""

__version__ = "0.1.0"
