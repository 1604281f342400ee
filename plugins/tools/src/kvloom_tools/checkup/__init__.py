"""The checks of `kvloom doctor`. Each runs whatever the others find."""

from kvloom_tools.checkup.finding import Finding as Finding
