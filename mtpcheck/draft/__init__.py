"""Draft acceptance: what an MTP layer proposes against what its own model would have said."""
