"""What `kvloom doctor` looks at. Whatever is found, the rest is looked at too."""

from kvloom.checkup.finding import Finding as Finding
