from fever.cli.main import main

main()
