"""What `kvloom doctor` looks at. Whatever is found, the rest is looked at too."""

from kvloom_tools.checkup.finding import Finding as Finding
