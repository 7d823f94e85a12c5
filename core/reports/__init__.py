"""Reports for people: tables and pictures, shown at a terminal or as one page that needs no net."""
