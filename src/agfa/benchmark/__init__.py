"""From finished runs to what was found: records, figures, report."""
