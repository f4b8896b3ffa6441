import sys

from tools.planted_bugs.run import main

sys.exit(main())
