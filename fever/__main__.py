from fever.cli import main

main()
