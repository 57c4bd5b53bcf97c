from mtpcheck.cli import main

main()
